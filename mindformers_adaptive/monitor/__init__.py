"""What a run did with its loss scale: the record, the callbacks that write it, TensorBoard."""

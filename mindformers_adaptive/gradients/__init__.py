"""What a format does to the gradients of a network, scale by scale, and which loss scale to start from."""

"""Loss scaling in MindFormers' PyNative trainer, ``mindformers.pynative.trainer``."""

"""What ``mindspore.amp`` has for scaling losses, with the adaptive rule and on CPU too."""

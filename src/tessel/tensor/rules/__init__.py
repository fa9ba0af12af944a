"""What torch's functions do with spread tensors, by kind."""

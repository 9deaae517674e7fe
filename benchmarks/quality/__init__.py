"""What answers are worth: distributions and exact match."""

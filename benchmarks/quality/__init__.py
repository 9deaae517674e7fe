"""Quality of answers: distributions and exact match."""

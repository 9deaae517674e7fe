"""Speed of training steps, and proof that a killed run resumes."""

"""Speed of training steps, and proof that a run that dies resumes."""

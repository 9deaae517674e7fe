"""Speed of training steps, proof that a killed run resumes, and the study of what a conversion keeps."""

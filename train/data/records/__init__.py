"""Records of files: which shapes they may have, and the conversations and texts that they become."""

"""Training data: from files or generated tasks to packed rows. Data sources are in `sources`."""

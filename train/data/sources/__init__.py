"""Data sources, one file each, which register themselves in `idlm.train.data.base.SOURCES`."""

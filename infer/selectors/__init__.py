"""Selectors of drafts, one file each; the contract is in base.py."""

"""Planned memory of one forward pass: `trunk` registers it, `chunking` plans it, `arena` holds it."""

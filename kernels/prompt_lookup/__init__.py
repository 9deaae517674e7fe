"""Drafts looked up in a sequence's own tokens; contract in README.md."""

from idlm.kernels.prompt_lookup.op import LONGEST, look_up

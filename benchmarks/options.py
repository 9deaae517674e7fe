"""`key=value` arguments of the benchmark commands."""

from __future__ import annotations

from collections.abc import Sequence

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError


def parse_options(arguments: Sequence[str], defaults: dict[str, str]) -> dict[str, str]:
    """Merge `key=value` arguments into `defaults`; an unknown key raises UserError IDLM-0107."""
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise UserError(
                "IDLM-0107",
                f"unknown argument {argument!r}{did_you_mean(key, options)}",
                fix=f"use some of {sorted(options)}, as key=value",
            )
        options[key] = value
    return options

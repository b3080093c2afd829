"""The environment of a process whose locale has ASCII alone, as one has it that names an 8-bit locale."""

from __future__ import annotations

# Without the last two Python takes UTF-8 for the C locale.
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

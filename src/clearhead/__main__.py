"""python -m clearhead

For -m, Python puts the current folder at the front of sys.path, where a `torch.py` would be imported instead of torch.
It is removed before anything else is imported; the command `clearhead` never has it.
"""

import os
import sys

try:
    current = os.path.realpath(os.getcwd())
except OSError:  # it was deleted: there is nothing to import from it
    current = ""
if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == current:
    del sys.path[0]

from clearhead.cli.main import main

sys.exit(main())

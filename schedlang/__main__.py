"""`python -m schedlang` is `schedc`."""

import sys

from schedlang.cli import main

sys.exit(main())

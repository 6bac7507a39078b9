"""`python -m schedlang` is `schedc`."""

import sys

from schedlang.cli.main import main

sys.exit(main())

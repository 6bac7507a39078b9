"""torchrun, for `schedc run`, without its own tracebacks: the ranks print themselves what went
wrong.
"""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Launch what the arguments say, as torchrun does. The exit code is 1 if a rank fails, or 128 +
    the number of a signal.
    """
    logging.disable(logging.WARNING)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError:
        sys.exit(1)
    except SignalException as error:
        print(f"\nstopped by {error.sigval.name}", file=sys.stderr)
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()

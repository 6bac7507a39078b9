"""torchrun, for `schedc run`, without its own tracebacks and log: the ranks print themselves what
went wrong, but for one that is killed.
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Launch what the arguments say, as torchrun does. The exit code is 1 if a rank fails, or 128 +
    the number of a signal.
    """
    logging.disable(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"the process of rank {rank} was ended by {name}", file=sys.stderr)
        sys.exit(1)
    except SignalException as error:
        print(f"\nstopped by {error.sigval.name}", file=sys.stderr)
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()

"""`torchrun --nproc-per-node N -m schedlang.runtime PROGRAM|PLAN`: train a small GPT with N
ranks.
"""

from schedlang.examples.demo.command import run

if __name__ == "__main__":
    run()

"""How many candidates `schedc tune` looks at in a minute: `make bench WHAT=tune`.

Llama 3 with 8 billion weights on eight H100, the whole gallery, at two sizes of batch: candidates,
how many of them had to be simulated, and the time. Processor time is of all processes together, so
that it is the same on a machine with other work; a minute of two cores has 120 s of it.
"""

from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import perf_counter

from schedlang.extras.search.tune.candidates import Training
from schedlang.extras.search.tune.decoder_config import decoder_of
from schedlang.extras.search.tune.layer_sources import layers_of_model, powers_of_two
from schedlang.extras.search.tune.tried_programs import read_programs
from schedlang.extras.search.tune.tuning import tune
from schedlang.schedule.costs.devices import DEVICES

CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
}
DEVICE = DEVICES["H100"]
RANKS = 8
SEQUENCE = 4096
BATCHES = (32, 64)
#: The processor time of two cores in a minute.
_MINUTE = 120.0


def spent() -> float:
    """The processor time of this process and of those that it has waited for, in seconds."""
    own = getrusage(RUSAGE_SELF)
    others = getrusage(RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def main() -> None:
    """Print a line for each size of batch."""
    memory = DEVICE.room
    print(
        "batch  candidates  simulated  processor time  elapsed  candidates per minute of two cores"
    )
    for batch in BATCHES:
        before = spent()
        start = perf_counter()
        layers = layers_of_model(
            decoder_of(CONFIG), DEVICE, SEQUENCE, powers_of_two(batch), memory
        )
        training = Training(layers, RANKS, batch, memory, {}, "portable")
        tuning = tune(read_programs([]), training)
        seconds = spent() - before
        elapsed = perf_counter() - start
        rate = tuning.candidates / seconds * _MINUTE
        print(
            f"{batch:5}  {tuning.candidates:10,}  {len(tuning.results):9,}  {seconds:12.1f} s  "
            f"{elapsed:5.0f} s  {rate:,.0f}"
        )


if __name__ == "__main__":
    main()

"""Golden files of many messages: a section for each mistake, with what was written and the answer."""


def section(shown: str, answer: str) -> str:
    """What is wrong, and below it what the user is told."""
    return f"{'=' * 80}\n{shown.rstrip()}\n{'-' * 80}\n{answer.rstrip()}\n"

"""Named errors. The text of each is one sentence for a person: it names the input and the way out."""


class LabError(Exception):
    """A request that cannot be served as it was made, and no fault of the program."""


class UnknownModelError(LabError):
    """No model of that name, folder, hub id or file."""


class CheckpointError(LabError):
    """A checkpoint that is incomplete, damaged or of an architecture the lab cannot run."""


class CacheError(LabError):
    """A cache on which a model with a memory cannot go on."""


class TokenizerMismatchError(LabError):
    """A tokenizer whose canonical ids are not those the memory was trained with."""


class PromptError(LabError):
    """A prompt that is empty, too long or not text."""


class TargetError(LabError):
    """A target or answer that is not the single token it has to be."""


class AlignmentError(LabError):
    """Two models whose positions cannot be matched by text."""


class DataError(LabError):
    """Training or evaluation text that cannot be used."""


class OutOfMemoryError(LabError):
    """The memory of the device or the computer is not enough for a model or a run."""


class NotFiniteError(CheckpointError):
    """A model that gives NaN or infinity where it was run, and a number where it was checked when it was opened."""


class Cancelled(Exception):
    """The user cancelled; raised by a progress callback, never a failure."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, cut down to a part of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:240].rstrip(".:")

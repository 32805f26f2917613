"""All models of the zoo by name."""

from __future__ import annotations

from tests.models.architecture import Architecture
from tests.models.hugging_face_both import ADAPTERS, BOTH
from tests.models.hugging_face_decoders import DECODERS
from tests.models.hugging_face_encoders import ENCODERS
from tests.models.hugging_face_images import IMAGES
from tests.models.hugging_face_sounds import SOUNDS
from tests.models.written_here import HERE


def titled(architecture: Architecture) -> str:
    """Return the name of a model, with its source if it is not written here."""
    source = "" if architecture.source == "here" else f" ({architecture.source})"
    return architecture.name + source


ALL = [*HERE, *DECODERS, *ENCODERS, *IMAGES, *SOUNDS, *BOTH, *ADAPTERS]
ZOO: dict[str, Architecture] = {titled(one): one for one in ALL}
assert len(ZOO) == len(ALL), "two exhibits have one name"

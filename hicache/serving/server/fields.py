"""Types of fields that several request bodies share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError


def _with_utf8(text: str) -> str:
    """Return the text. Raises an error for lone surrogates, which JSON can encode and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("no_utf8", "the text has no UTF-8 form: it has a lone surrogate") from None
    return text


# Names of the branches of a union. A discriminator chooses the branch for a value. Without it, a wrong list would cause
# an error for each item in each branch.
SHAPES = ("as text", "as texts", "as ids", "as lists of ids", "as chat")


def shape_of(value: object) -> str:
    if not isinstance(value, list):
        return "as text"
    if value and isinstance(value[0], list):
        return "as lists of ids"
    return "as texts" if value and isinstance(value[0], str) else "as ids"


def text_or_list(value: object) -> str:
    return "as texts" if isinstance(value, list) else "as text"


Text = Annotated[str, AfterValidator(_with_utf8)]
StopText = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_with_utf8)]
SaltText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_with_utf8)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]  # a str, because the keys of JSON objects are strings
Bias = Annotated[float, Field(ge=-100, le=100)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]  # number of most likely tokens
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[
    Annotated[StopText, Tag("as text")]
    | Annotated[list[StopText], Field(max_length=16, fail_fast=True), Tag("as texts")],
    Discriminator(text_or_list),
]

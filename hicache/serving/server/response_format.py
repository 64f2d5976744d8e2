"""OpenAI's field `response_format`: text, any JSON object, or JSON that matches a schema."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

_MAX_SCHEMA = 1 << 16  # maximum characters, because the event loop parses the schema


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextFormat(_Strict):
    type: Literal["text"]

    @property
    def answer_schema(self) -> str | None:
        return None


class ObjectFormat(_Strict):
    type: Literal["json_object"]

    @property
    def answer_schema(self) -> str | None:
        return '{"type": "object"}'


def _as_text(value: object) -> str:
    if not isinstance(value, dict):
        raise PydanticCustomError("no_object", "a schema is an object here")
    text = json.dumps(value)
    if len(text) > _MAX_SCHEMA:
        raise PydanticCustomError("too_long", f"the schema has {len(text)} characters, at most {_MAX_SCHEMA} are read")
    return text


SchemaText = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": "object"})]


class NamedSchema(_Strict):
    """A schema with a name. `strict` is always treated as true, because answers always match the schema."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[SchemaText, Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def answer_schema(self) -> str | None:
        return self.json_schema.schema_


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]

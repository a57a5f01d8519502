"""What all sections of the config are made of: their base class, and the ranges of the numbers in them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Unit = Annotated[float, Field(ge=0, lt=1)]

# Sizes that end far above anything trained and far below what would keep a check, or a rank, busy for ever: beyond
# them a digit too many was typed.
Degree = Annotated[int, Field(ge=1, le=2**17)]
Depth = Annotated[int, Field(ge=1, le=2**13)]
Width = Annotated[int, Field(ge=1, le=2**22)]
Vocabulary = Annotated[int, Field(ge=1, le=2**26)]
Length = Annotated[int, Field(ge=1, le=2**30)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Steps = Annotated[int, Field(ge=1, le=2**40)]
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Section(BaseModel):
    """Base of all sections: values of exactly the stated type, no unknown keys, never changed after reading."""

    model_config = _STRICT

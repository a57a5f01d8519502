"""Values between the floating dtypes of safetensors, in parts: the memory needed is that of the result."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CAST_ELEMENTS = 1 << 20

_PLAIN = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def cast(values: NDArray[Any], dtype: str, *, source: str | None = None, factor: float = 1.0) -> NDArray[Any]:
    """Values times `factor` in a safetensors dtype, rounded to nearest even; bfloat16 is uint16 bits on both sides.

    source: what the values are (missing: what numpy says). Where nothing changes, the values themselves.
    """
    if factor == 1.0 and (source == dtype or (dtype in _PLAIN and values.dtype == _PLAIN[dtype])):
        return values
    out = np.empty(values.shape, np.uint16 if dtype == "BF16" else _PLAIN[dtype])
    flat_in, flat_out = values.reshape(-1), out.reshape(-1)
    for start in range(0, flat_in.size, CAST_ELEMENTS):
        part = flat_in[start : start + CAST_ELEMENTS]
        part = _from_bfloat16(part) if source == "BF16" else part
        part = part * factor if factor != 1.0 else part
        flat_out[start : start + CAST_ELEMENTS] = _bfloat16_bits(part) if dtype == "BF16" else part
    return out


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding may carry a NaN's mantissa into the exponent and make it infinite or negative zero; keep it a NaN.
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)

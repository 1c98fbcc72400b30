"""Read a checkpoint with nothing but numpy: python read_checkpoint.py FOLDER_OF_A_STEP"""

import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


def read_tensor(folder: Path, tensor: dict) -> np.ndarray:
    """Put a global tensor together from its boxes."""
    whole = np.empty(tensor["shape"], DTYPES[tensor["dtype"]])
    for box in tensor["boxes"]:
        with open(folder / box["file"], "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            start, stop = json.loads(file.read(length))[box["key"]]["data_offsets"]
            file.seek(8 + length + start)
            data = np.frombuffer(file.read(stop - start), whole.dtype).reshape(box["shape"])
        whole[tuple(slice(o, o + n) for o, n in zip(box["offset"], box["shape"], strict=True))] = data
    # BF16 is the upper half of a float32
    return (whole.astype("<u4") << 16).view("<f4") if tensor["dtype"] == "BF16" else whole


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    index = json.loads((folder / "index.json").read_text())
    for name, tensor in index["tensors"].items():
        print(f"{name} {tuple(tensor['shape'])} sum {read_tensor(folder, tensor).astype('f8').sum():.6f}")

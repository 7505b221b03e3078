"""Print the SHA-256 of every array of Orbax folders as tensorstore reads it.

File names in these folders are random, so their bytes cannot be compared."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import tensorstore

for folder in sys.argv[1:]:
    tree = json.loads(Path(folder, "_METADATA").read_text())["tree_metadata"]
    for entry in tree.values():
        name = ".".join(part["key"] for part in entry["key_metadata"])
        store = {
            "driver": "ocdbt",
            "base": Path(folder).absolute().as_uri() + "/",
            "path": name + "/",
        }
        array = tensorstore.open({"driver": "zarr", "kvstore": store}).result().read().result()
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        print(folder, name, array.dtype, array.shape, digest)

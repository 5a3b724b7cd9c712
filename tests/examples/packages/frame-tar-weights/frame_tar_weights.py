"""A weight source that reads the safetensors files in an uncompressed `weights.tar`."""

from __future__ import annotations

import json
import math
import mmap
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from frame import hookimpl
from frame.core.errors import CheckpointError
from frame.interfaces.weights import FileRange, WeightSource, WeightSourceCapabilities, WeightSourceContext


@hookimpl
def register_weight_sources(registry) -> None:
    capabilities = WeightSourceCapabilities()
    registry.add("tar", f"{__name__}:TarSource", capabilities=capabilities, options=Options, summary="Reads a .tar of safetensors.")


def find_dtype(name: str):
    """A torch dtype by its name in safetensors, such as BF16 or F8_E4M3."""
    import torch

    special = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8", "BOOL": "bool"}
    return getattr(torch, special.get(name) or name.replace("F", "float").replace("I", "int"))


class Options(BaseModel):
    file: str = "weights.tar"


class MappedTensor:
    """Reads what an index asks for, and copies nothing else."""

    def __init__(self, file: mmap.mmap, place: FileRange) -> None:
        self.file, self.place, self.shape = file, place, place.shape

    def __getitem__(self, index):
        import torch

        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.place.dtype)[index]
        whole = torch.frombuffer(self.file, dtype=self.place.dtype, count=count, offset=self.place.offset)
        return whole.view(self.shape)[index].clone()


class TarSource(WeightSource):
    """Tensors are ranges of one file: the CPU reads them from its memory map, a GPU ahead."""

    def __init__(self, context: WeightSourceContext, options: Options | None = None) -> None:
        self.path = context.folder / (options or Options()).file
        self.ranges: dict[str, FileRange] = {}
        try:
            with tarfile.open(self.path, "r:") as archive, self.path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                for member in archive:
                    if member.name.endswith(".safetensors"):
                        self.add_file(member.offset_data, member.size)
        except (OSError, ValueError, KeyError, tarfile.TarError) as error:
            raise CheckpointError(f"{self.path} is missing or damaged ({error}): copy it again.") from error
        if not self.ranges:
            raise CheckpointError(f"{self.path} holds no safetensors file: add one.")

    def add_file(self, start: int, size: int) -> None:
        header = 8 + int.from_bytes(self.map[start : start + 8], "little")
        if start + size > len(self.map) or header > size:
            raise ValueError("the archive ends early")
        for name, entry in json.loads(self.map[start + 8 : start + header]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                if header + end > size:
                    raise ValueError(f"{name} ends after its file")
                self.ranges[name] = FileRange(self.path, find_dtype(entry["dtype"]), tuple(entry["shape"]), start + header + first)

    def list_names(self) -> Sequence[str]:
        return sorted(self.ranges, key=lambda name: self.ranges[name].offset)

    def open_tensor(self, name: str):
        return MappedTensor(self.map, self.ranges[name])

    def close(self) -> None:
        self.map.close()

    def find_range(self, name: str) -> FileRange | None:
        return self.ranges[name]

    @classmethod
    def write_checkpoint(cls, folder: Path, tensors: Mapping, num_files: int = 1) -> None:
        super().write_checkpoint(folder, tensors, num_files)
        with tarfile.open(folder / "weights.tar", "w") as archive:
            for file in sorted(folder.glob("*.safetensors")):
                archive.add(file, file.name)
                file.unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)

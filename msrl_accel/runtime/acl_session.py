"""An OM file run by pyACL, the Python interface that comes with CANN. Not yet run on a device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import PolicyError

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_MALLOC_HUGE_FIRST = 0
_REPEATED_INIT = 100002
"""acl.init was called before in this process, by us or by another library."""
_BATCH_INPUT = "ascend_mbatch_shape_data"
"""Name of the input that ATC adds for batch profiles."""

# aclDataType
_DTYPES: Mapping[int, np.dtype[Any]] = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    2: np.dtype(np.int8),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    9: np.dtype(np.int64),
    12: np.dtype(np.bool_),
}


class AclSession:
    """A model on a device, with its buffers.

    Args:
        model: the OM file.
        device: index among the devices that this process sees.
        batches: sizes it was compiled for; None asks the model.

    Raises:
        PolicyError: a call of pyACL failed; the message names it and its error code.
    """

    def __init__(self, model: Path, device: int, batches: Sequence[int] | None) -> None:
        acl = load_engine("acl")
        self._acl = acl
        self._device = device
        self._buffers: list[tuple[int, int]] = []
        self._datasets: list[int] = []
        self._description: int | None = None
        self._model: int | None = None
        self._context: int | None = None
        code = acl.init()
        if code != _REPEATED_INIT:
            _check(code, "acl.init")
        try:
            self._open(model, batches)
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inputs of one of the batch sizes -> outputs, which the caller owns."""
        acl = self._acl
        _check(acl.rt.set_context(self._context), "acl.rt.set_context")
        if len(inputs) != len(self._inputs):
            raise PolicyError(
                f"the model takes {len(self._inputs)} inputs, this policy gives {len(inputs)}: "
                "the file is of another policy"
            )
        for (pointer, size), dtype, x in zip(self._inputs, self._input_dtypes, inputs):
            x = np.ascontiguousarray(x, dtype)
            if x.nbytes > size:
                raise PolicyError(
                    f"an input has {x.nbytes} bytes, the model takes at most {size}: "
                    "the file is of another policy"
                )
            code = acl.rt.memcpy(pointer, size, x.ctypes.data, x.nbytes, _HOST_TO_DEVICE)
            _check(code, "acl.rt.memcpy")
        if self._batch_index is not None:
            code = acl.mdl.set_dynamic_batch_size(
                self._model, self._datasets[0], self._batch_index, len(inputs[0])
            )
            _check(code, "acl.mdl.set_dynamic_batch_size")
        code = acl.mdl.execute(self._model, self._datasets[0], self._datasets[1])
        _check(code, "acl.mdl.execute")
        return [self._fetch(i, *buffer) for i, buffer in enumerate(self._outputs)]

    def close(self) -> None:
        """Unload the model and free its buffers; the process stays initialised for others."""
        acl = self._acl
        for dataset in self._datasets:
            for i in range(acl.mdl.get_dataset_num_buffers(dataset)):
                acl.destroy_data_buffer(acl.mdl.get_dataset_buffer(dataset, i))
            acl.mdl.destroy_dataset(dataset)
        for pointer, _ in self._buffers:
            acl.rt.free(pointer)
        if self._description is not None:
            acl.mdl.destroy_desc(self._description)
        if self._model is not None:
            acl.mdl.unload(self._model)
        if self._context is not None:
            acl.rt.destroy_context(self._context)
            acl.rt.reset_device(self._device)
        self._datasets, self._buffers = [], []
        self._description = self._model = self._context = None

    def _open(self, model: Path, batches: Sequence[int] | None) -> None:
        acl = self._acl
        _check(acl.rt.set_device(self._device), f"acl.rt.set_device({self._device})")
        self._context = _value(acl.rt.create_context(self._device), "acl.rt.create_context")
        self._model = _value(acl.mdl.load_from_file(str(model)), f"acl.mdl.load_from_file({model})")
        self._description = acl.mdl.create_desc()
        _check(acl.mdl.get_desc(self._description, self._model), "acl.mdl.get_desc")
        description = self._description
        self._batch_index = self._find_batch_input()
        self.batches = tuple(sorted(batches or self._compiled_batches()))
        sizes = [
            acl.mdl.get_input_size_by_index(description, i)
            for i in range(acl.mdl.get_num_inputs(description))
        ]
        buffers = self._dataset(sizes)
        plain = [i for i in range(len(sizes)) if i != self._batch_index]
        self._inputs = [buffers[i] for i in plain]
        self._input_dtypes = [
            _dtype(acl.mdl.get_input_data_type(description, i), f"input {i}") for i in plain
        ]
        self._outputs = self._dataset(
            [
                acl.mdl.get_output_size_by_index(description, i)
                for i in range(acl.mdl.get_num_outputs(description))
            ]
        )

    def _find_batch_input(self) -> int | None:
        index, code = self._acl.mdl.get_input_index_by_name(self._description, _BATCH_INPUT)
        return index if code == 0 else None

    def _compiled_batches(self) -> list[int]:
        """Profiles of the model, or its one batch size."""
        if self._batch_index is not None:
            found = _value(
                self._acl.mdl.get_dynamic_batch(self._description), "acl.mdl.get_dynamic_batch"
            )
            if found["batchCount"]:
                return [int(b) for b in found["batch"][: found["batchCount"]]]
        dims = _value(self._acl.mdl.get_input_dims(self._description, 0), "acl.mdl.get_input_dims")
        batch = int(dims["dims"][0])
        if batch < 1:
            raise PolicyError("the model has no batch sizes: build it with batch profiles")
        return [batch]

    def _dataset(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """A dataset with a device buffer for each size."""
        acl = self._acl
        dataset = acl.mdl.create_dataset()
        self._datasets.append(dataset)
        buffers = []
        for size in sizes:
            pointer = _value(acl.rt.malloc(size, _MALLOC_HUGE_FIRST), "acl.rt.malloc")
            self._buffers.append((pointer, size))
            buffers.append((pointer, size))
            added = acl.mdl.add_dataset_buffer(dataset, acl.create_data_buffer(pointer, size))
            _value(added, "acl.mdl.add_dataset_buffer")
        return buffers

    def _fetch(self, index: int, pointer: int, size: int) -> np.ndarray:
        """Copy an output of the last call to the host, in the shape that it had there."""
        acl = self._acl
        code = acl.mdl.get_output_data_type(self._description, index)
        dims = _value(
            acl.mdl.get_cur_output_dims(self._description, index), "acl.mdl.get_cur_output_dims"
        )
        output = np.empty(dims["dims"], _dtype(code, f"output {index}"))
        if output.nbytes > size:
            raise PolicyError(f"output {index} has {output.nbytes} bytes, its buffer {size}")
        code = acl.rt.memcpy(
            output.ctypes.data, output.nbytes, pointer, output.nbytes, _DEVICE_TO_HOST
        )
        _check(code, "acl.rt.memcpy")
        return output


def _dtype(code: int, what: str) -> np.dtype[Any]:
    if code not in _DTYPES:
        raise PolicyError(f"{what} of the model has aclDataType {code}, which no policy has")
    return _DTYPES[code]


def load_engine(name: str) -> Any:
    """Import a module of CANN.

    Raises:
        PolicyError: its libraries cannot be loaded; the message has the loader's words.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PolicyError(
            f"{name} cannot be loaded ({error}): source set_env.sh of CANN in this shell"
        ) from error


def _check(code: int, what: str) -> None:
    if code != 0:
        raise PolicyError(
            f"{what} failed with aclError {code}: run msrl-doctor, and see the log in ~/ascend/log"
        )


def _value(result: tuple[Any, int], what: str) -> Any:
    value, code = result
    _check(code, what)
    return value

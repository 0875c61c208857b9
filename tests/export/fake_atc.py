#!/usr/bin/env python3
"""Stands in for ATC: takes the arguments as strictly as its documentation, and writes a file.

Environment: FAKE_ATC_FAIL=CODE prints that error code and fails; FAKE_ATC_SAW=FILE gets the
arguments as JSON.
"""

import json
import os
import re
import sys
from pathlib import Path

KNOWN = {
    "framework",
    "model",
    "output",
    "soc_version",
    "input_format",
    "input_shape",
    "dynamic_batch_size",
    "dynamic_dims",
    "precision_mode_v2",
    "log",
}
PRECISIONS = {"fp16", "origin", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16"}


def fail(code, text):
    print("ATC start working now, please wait for a moment.")
    print("ATC run failed, Please check the detail log, Try 'atc --help' for more information")
    print(f"{code}: [PID: 1] 2026-01-01-00:00:00.000.000 {text}")
    sys.exit(255)


def shapes_of(text):
    shapes = {}
    for item in text.split(";"):
        name, colon, dims = item.rpartition(":")
        if not colon or not name or not re.fullmatch(r"-?\d+(,-?\d+)*", dims):
            fail("E10002", f"Value {text} for parameter --input_shape is invalid.")
        shapes[name] = [int(d) for d in dims.split(",")]
    return shapes


def model_shapes(path):
    import onnx

    graph = onnx.load(path).graph
    constants = {i.name for i in graph.initializer}
    return {
        i.name: [d.dim_value or -1 for d in i.type.tensor_type.shape.dim]
        for i in graph.input
        if i.name not in constants
    }


def check_profiles(options, shapes):
    open_dims = [d for dims in shapes.values() for d in dims if d == -1]
    if "dynamic_batch_size" not in options:
        if open_dims:
            fail("E10011", "Shape values must be positive integers.")
        return
    if not re.fullmatch(r"\d+(,\d+)*", options["dynamic_batch_size"]):
        fail("E10003", "Value for parameter --dynamic_batch_size is invalid.")
    profiles = [int(b) for b in options["dynamic_batch_size"].split(",")]
    if not open_dims:
        fail("E10031", "none of the nodes has a batch size equaling -1.")
    if any(-1 in dims[1:] for dims in shapes.values()):
        fail("E10018", "only batch size N can be -1 in --input_shape.")
    if len(profiles) < 2:
        fail("E10035", "has 1 profiles, which is less than the minimum 2.")
    if len(profiles) > 100:
        fail("E10036", "profiles, which is greater than the maximum 100.")
    if len(set(profiles)) != len(profiles):
        fail("E10039", "argument have duplicate profiles.")
    if min(profiles) < 1:
        fail("E10038", "Dimension size 0 is invalid.")


def main():
    options = {}
    for argument in sys.argv[1:]:
        match = re.fullmatch(r"--(\w+)=(.+)", argument, re.DOTALL)
        if not match or match.group(1) not in KNOWN:
            fail("E10001", f"Value {argument} is invalid. Reason: unknown option")
        options[match.group(1)] = match.group(2)
    if "FAKE_ATC_SAW" in os.environ:
        Path(os.environ["FAKE_ATC_SAW"]).write_text(json.dumps(options))
    for name in ("framework", "model", "output", "soc_version"):
        if not options.get(name):
            fail("E10054", f"The required parameter {name} for ATC is empty.")
    if options["framework"] != "5":
        fail("E10007", "--framework is required. The value must be 5.")
    if not re.fullmatch(r"Ascend\w+", options["soc_version"]):
        fail("E10001", "Value for parameter --soc_version is invalid.")
    if options.get("input_format") not in (None, "ND", "NCHW", "NCDHW"):
        fail("E10001", "Value for parameter --input_format is invalid.")
    if options.get("precision_mode_v2") not in PRECISIONS:
        fail("E10001", "Value for parameter --precision_mode_v2 is invalid.")
    if options.get("log") not in ("debug", "info", "warning", "error", "null"):
        fail("E10010", "Value for parameter --log is invalid.")
    if "dynamic_batch_size" in options and "dynamic_dims" in options:
        fail("E10009", "--dynamic_batch_size and --dynamic_dims are mutually exclusive.")
    shapes = shapes_of(options["input_shape"])
    model = model_shapes(options["model"])
    for name, dims in shapes.items():
        if name not in model:
            fail("E10016", f"Opname {name} specified in --input_shape is not found in the model.")
        if len(dims) != len(model[name]) or dims[1:] != model[name][1:]:
            fail("E10049", "Dimension count does not match dimension count of the node.")
    if set(shapes) != set(model):
        fail("E11005", "The shape is not defined by using --input_shape for an input.")
    check_profiles(options, shapes)
    if "FAKE_ATC_FAIL" in os.environ:
        fail(os.environ["FAKE_ATC_FAIL"], "Failed to compile Op MatMul_3.")
    Path("kernel_meta").mkdir(exist_ok=True)
    Path(options["output"] + ".om").write_bytes(b"IMOD" + Path(options["model"]).read_bytes()[:64])
    print("ATC run success, welcome to the next use.")


main()

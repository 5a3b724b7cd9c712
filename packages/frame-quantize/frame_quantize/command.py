"""`frame quantize MODEL --method METHOD --out FOLDER`. The libraries are imported when it runs."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import nullcontext
from copy import copy
from pathlib import Path

import click

from frame.host.installation import install_command
from frame.host.progress import is_terminal, show_progress
from frame.interfaces.cli import CliCommand
from frame_quantize.schemes import CACHE_SCALES, METHODS

LIBRARY = "llmcompressor>=0.14"  # brings compressed-tensors, datasets and transformers
_METHODS = "\n".join(f"  {name}: {method.summary}" for name, method in METHODS.items())


@click.command(
    name="quantize",
    help="Write a quantized copy of the checkpoint MODEL.\n\nMODEL is a folder or a Hugging Face id.\n\nMethods:\n\n\b\n" + _METHODS,
)
@click.argument("model")
@click.option("--method", type=click.Choice(tuple(METHODS)), required=True, help="How the weights are quantized.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write; it must be empty or absent.")
@click.option("--group-size", type=click.IntRange(min=16), help="Inputs that share a scale, for 4 bits. Default: 128.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Sample texts for gptq and awq: a JSON Lines file of objects with `text`, or one text a line.",
)
@click.option("--samples", type=click.IntRange(min=1), default=512, show_default=True, help="Maximum number of sample texts.")
@click.option("--max-length", type=click.IntRange(min=8), default=2048, show_default=True, help="Tokens of a sample that are used.")
@click.option("--ignore", multiple=True, metavar="REGEX", help="Names of layers that stay unquantized; repeatable.")
@click.option("--kv-cache", type=click.Choice(tuple(CACHE_SCALES)), help="Calibrate scales of an fp8 KV cache: by layer or by KV head.")
@click.option("--device", default=None, help="Device of the computation, such as cuda:0. Default: the first GPU, or the CPU.")
def command(
    model: str,
    method: str,
    out: Path,
    group_size: int | None,
    calibration: Path | None,
    samples: int,
    max_length: int,
    ignore: tuple[str, ...],
    kv_cache: str | None,
    device: str | None,
) -> None:
    """See the help text."""
    shows_bars = is_terminal()
    if not shows_bars:
        os.environ["TQDM_DISABLE"] = "1"  # the bars of llmcompressor, in whose place a line every ten seconds is written
    chosen = METHODS[method]
    if chosen.is_calibrated and calibration is None:
        raise click.UsageError(f"--method {method} needs sample texts: name a file with --calibration.")
    if not chosen.is_calibrated and calibration is not None:
        raise click.UsageError(f"--method {method} reads no sample texts: leave --calibration out, or choose gptq or awq.")
    if kv_cache and not chosen.is_calibrated:
        raise click.UsageError(f"--method {method} reads no sample texts, which --kv-cache needs: choose gptq or awq.")
    if group_size is not None and "group_size" not in chosen.weights:
        raise click.UsageError(f"--method {method} has a scale per output: leave --group-size out.")
    if not Path(model).is_dir() and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise click.UsageError(f"MODEL {model} is no folder: give the folder of a checkpoint, or a Hugging Face id.")
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"--out {out} is not empty: name another folder.")
    for pattern in ignore:
        try:
            re.compile(pattern)
        except re.error as error:
            raise click.UsageError(f"--ignore {pattern!r} is no regular expression: {error}.") from None
    try:
        from frame_quantize.quantize import check_device, check_model, quantize_calibrated, quantize_weights, read_samples
    except ModuleNotFoundError as error:
        missing = (error.name or "llmcompressor").partition(".")[0]
        raise click.ClickException(f"frame quantize needs the Python module {missing}: run {install_command(LIBRARY)}") from error

    weights = {**chosen.weights, **({"group_size": group_size} if group_size else {})}
    try:
        check_device(device)
        check_model(model)
        with nullcontext() if shows_bars else show_progress(f"quantizing {model}"):
            if calibration is None:
                quantize_weights(model, out, weights, chosen.activations, ignore, device)
            else:
                texts = read_samples(calibration, samples)
                quantize_calibrated(model, out, method, weights, ignore, texts, max_length, device, CACHE_SCALES.get(kv_cache or ""))
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)  # what was written so far; the folder was empty or absent
        if isinstance(error, (ValueError, OSError)):
            raise click.ClickException(str(error).splitlines()[0]) from error
        raise
    click.echo(f"Wrote {out}. Serve it: frame serve --model {out}")


class Quantize(CliCommand):
    """The command as a plugin."""

    def make_command(self) -> click.Command:
        made = copy(command)  # callers may add to one
        made.params = [*command.params]
        return made

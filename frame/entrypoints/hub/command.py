"""`frame pull ORG/NAME[:REVISION]`: downloads a model into the cache, from which `frame serve
--model ORG/NAME` serves it. Prints the folder."""

from __future__ import annotations

from typing import Any

import click

from frame.checkpoint.hub_cache import HubName, parse_hub_name

HELP = "Download a model from a hub into the cache of huggingface_hub. Fetches what is missing; an interrupted download continues."


class HubNameType(click.ParamType):
    """A hub's name."""

    name = "ORG/NAME[:REVISION]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> HubName:
        name = parse_hub_name(str(value))
        if name is None:
            self.fail(f"{value!r} is no name of a model on a hub; write ORG/NAME or ORG/NAME:REVISION", param, ctx)
        return name


@click.command(
    "pull", help=HELP, epilog="HF_ENDPOINT names a mirror, HF_TOKEN an access token, HF_HUB_CACHE the folder; HF_HUB_OFFLINE forbids all."
)
@click.argument("name", type=HubNameType())
@click.option("--trust-remote-code", "code", is_flag=True, help="Fetch the Python code of the checkpoint too. It is not run.")
@click.option("--gguf", metavar="NAME", help="Fetch the GGUF file with this in its name, such as Q4_K_M, instead of safetensors files.")
def command(name: HubName, code: bool, gguf: str | None) -> None:
    from frame.entrypoints.hub.errors import DownloadError
    from frame.entrypoints.hub.pull import FileSelection, pull

    try:
        pulled = pull(name, FileSelection(code=code, gguf=gguf))
    except DownloadError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{name} is commit {pulled.commit}: {pulled.num_files} files, {pulled.size / 1e9:,.2f} GB", err=True)
    click.echo(f"serve it: frame serve --model {name}", err=True)
    click.echo(str(pulled.folder))

"""Errors of downloads, each as one sentence with a remedy. Used by the modules of this folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from frame.checkpoint.hub_cache import HubName, find_cache
from frame.core.errors import ConfigError


class DownloadError(RuntimeError):
    """A download failed for a reason that may pass, or that another try repairs."""


def get_endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def describe_full(problem: str) -> str:
    return f"{problem} {find_cache()}: free space there, or set HF_HUB_CACHE to a folder of a larger disk."


@contextmanager
def explaining(name: HubName) -> Iterator[None]:
    """Raise errors of the block as one sentence with a remedy."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name.repository} is gated: accept its conditions at {get_endpoint()}/{name.repository}, and set HF_TOKEN to a token of that"
            " account."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{get_endpoint()} has no model {name.repository}, or it is private: check the name, or set HF_TOKEN to a token that may read"
            " it."
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{name.repository} has no revision {name.revision!r}: name a branch, a tag or a commit.") from None
    except errors.HFValidationError:
        raise ConfigError(f"{name.repository} is no name of a model: write ORG/NAME or ORG/NAME:REVISION.") from None
    except errors.OfflineModeIsEnabled:
        raise DownloadError(
            f"HF_HUB_OFFLINE is set, and {find_cache()} lacks {name}: unset it, or copy the cache of another machine."
        ) from None
    except errors.HfHubHTTPError as error:
        raise DownloadError(f"{get_endpoint()} returned status {error.response.status_code} for {name}; try again later.") from None
    except OSError as error:
        raise _explain_os_error(name, error) from None
    except Exception as error:
        if not _is_network_error(error):
            raise
        raise DownloadError(_describe_network(error)) from None


def _explain_os_error(name: HubName, error: OSError) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(describe_full(f"{name} does not fit into"))
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return DownloadError(f"{find_cache()} cannot be written ({error.strerror}): set HF_HUB_CACHE to a folder that can.")
    if error.filename is not None:
        return DownloadError(f"{error.filename} cannot be written: {error.strerror}.")
    return DownloadError(_describe_network(error))


def _is_network_error(error: Exception) -> bool:
    """Whether an error is of the HTTP library of huggingface_hub, which has changed it once."""
    from huggingface_hub import errors

    http_error: Any = errors.HTTPError
    return isinstance(error, http_error)


def _describe_network(error: Exception) -> str:
    detail = str(error).strip().split("\n")[0] or type(error).__name__
    remedy = "check the network, or set HF_ENDPOINT to a mirror; what has been downloaded is kept."
    return f"{get_endpoint()} cannot be reached ({detail}): {remedy}"

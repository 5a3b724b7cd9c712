"""The bodies of responses, as TypedDicts: what `/openapi.json` publishes. No response is validated
against them at run time."""

"""Exceptions that cross the package's border.

Every message names the thing, its value, what was expected and what to do; the command line prints
it as one line and exits with status 2. Broken invariants of our own are assertions instead.
"""


class DeepInferError(Exception):
    """Base of every error a user can cause or has to act on."""


class ConfigError(DeepInferError):
    """A setting, an environment variable or a config.json key has a value that cannot work."""


class CheckpointError(DeepInferError):
    """A checkpoint folder is missing, incomplete, corrupt or does not match its config.json."""


class TokenizerError(DeepInferError):
    """tokenizer.json is missing, unreadable or does not belong to the model."""


class RequestError(DeepInferError):
    """One request cannot be served as asked; other requests are not affected."""


class OutOfPages(DeepInferError):
    """The cache has no free page or state slot for a sequence that must grow."""


class Unsupported(DeepInferError):
    """A backend of an operator cannot serve its arguments; raised before any work."""

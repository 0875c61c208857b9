"""Errors that users see. Each message names the field, the value and the remedy."""


class MsrlError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(MsrlError):
    """A configuration key or value cannot be used."""


class SpaceError(MsrlError):
    """An observation or action space is not supported."""


class EnvError(MsrlError):
    """An environment is unknown, crashed, or returned something unusable."""


class CheckpointError(MsrlError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class PolicyError(MsrlError):
    """A policy was given inputs that do not fit its specification."""


class TrainingError(MsrlError):
    """Training cannot go on: its numbers are no longer finite."""


class PipelineError(MsrlError):
    """A stage of the asynchronous pipeline is stuck, has ended, or was used wrongly."""


class ExportError(MsrlError):
    """A policy cannot be exported, or its exported form does not act as it does."""


class BundleError(MsrlError):
    """A bundle is missing, damaged, or cannot be used here."""


class LMError(MsrlError):
    """A language model, its tokenizer or its files cannot be used."""


class ReplayError(MsrlError):
    """Experience replay was given what it cannot store, or asked for what it does not hold."""

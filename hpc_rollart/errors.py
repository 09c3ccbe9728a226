"""Errors whose text says all there is to say, so that no traceback is shown with them."""


class UserError(Exception):
    """What was asked for cannot be done as given; the text says why and the mend, one line per problem."""


class RunFailed(Exception):
    """The run cannot go on; the text says which rank or thing, where, and what was waited for."""


class LaunchError(UserError):
    """The ranks cannot be started here; the message says what is missing and the mend."""

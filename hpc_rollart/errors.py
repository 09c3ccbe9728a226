"""The one error that is the user's to mend."""


class UserError(Exception):
    """What was asked for cannot be done as given; the text says why and the mend, one line per problem."""

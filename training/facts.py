"""Small facts and set phrases the chat generator asks about, read from words/facts.json."""

from types import MappingProxyType

from training.lexicon import pairs, read_words

_READ = read_words("facts")
OPPOSITES = pairs(_READ["opposites"])
BABIES = pairs(_READ["babies"])
SOUNDS = pairs(_READ["sounds"])
CAPITALS = pairs(_READ["capitals"])
LEGS = pairs(_READ["legs"])
COLOR_OF = pairs(_READ["color_of"])
MEANINGS: MappingProxyType[str, str] = MappingProxyType(_READ["meanings"])
GROUPS = MappingProxyType({kind: tuple(members) for kind, members in _READ["groups"].items()})
DAYS = tuple(_READ["days"])
MONTHS = tuple(_READ["months"])
SPELL = tuple(_READ["spell"])
COUNTABLE = tuple(_READ["countable"])
SMALL_TALK = pairs(_READ["small_talk"])  # (questions, answers), each split at "|"
SYSTEMS = tuple(_READ["systems"])
FINISH = tuple(_READ["finish"])  # asks for the end of a story

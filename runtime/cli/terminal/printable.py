"""Text of a model made safe for a terminal: control sequences become symbols."""

# Control characters as pictures (those of C1 as a question mark); newlines and tabs stay.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def printable(text: str) -> str:
    return text.translate(_PICTURES)

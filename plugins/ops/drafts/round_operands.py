"""Operands that the ops of a round share."""

from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands

DRAFTS = Operand("drafts", Role.STATE, "i32[S+1,K]")
POSITIONS = Operand("positions", Role.STATE, "i32[S+1]")


ID_PAGES = Operand("id_pages", Role.STATE, "i32[P+1,1,page,1]", fill=operands.tokens)

"""What tests of the commands share: sessions of engines that they open again and again."""

from tests.runtime.executors.kept_sessions import kept_sessions as kept_sessions

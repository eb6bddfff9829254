"""Anthropic's Messages API, whose bodies become chats of OpenAI's."""

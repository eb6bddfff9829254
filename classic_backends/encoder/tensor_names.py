"""The names of an encoder's tensors."""

TEXT = "text_input"
PAIR = "text_pair"
IDS = "input_ids"
PROMPT = "prompt_name"
INSTRUCTION = "instruction"

EMBEDDING = "embedding"
SCORE = "score"
COUNT = "num_input_tokens"
TOKEN_EMBEDDING = "token_embedding"
"""FP32 [tokens, size]: a vector for each token that counts, zeros behind them."""

TOKEN_EMBEDDING_COUNT = "num_token_embeddings"
TOKEN_WEIGHT = "token_weight"
"""FP32 [tokens]: the importance of each token as a word, zeros behind them."""

TOKEN_IDS = "token_ids"
"""INT64 [tokens]: the tokens of the weights, -1 behind them."""

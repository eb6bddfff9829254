"""The names of an encoder's tensors: what the backend takes and gives, and the endpoints for encoders ask of it."""

TEXT = "text_input"
PAIR = "text_pair"
IDS = "input_ids"
"""Token ids in place of a text; rows that are shorter than the longest end with `NO_TOKEN`."""

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
"""INT64 [tokens]: the tokens of the weights, `NO_TOKEN` behind them."""

NO_TOKEN = -1

FINAL_SCORES = "final_scores"
"""A model's parameter: "true" where each of several scores means something by itself, and no softmax goes over them."""

QUERY = "query"
DOCUMENT = "document"
"""The prompts of a late-interaction model."""

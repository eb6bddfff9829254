"""The chat template of a checkpoint that has a tekken.json and no template: Mistral's own form of conversations, by the
version that the file names, as mistral-common writes it."""

from collections.abc import Collection, Mapping
from string import Template
from typing import NamedTuple


class _InstructForm(NamedTuple):
    """What distinguishes a version. Its parts are sources of the template."""

    calls: str
    """All calls of a message."""
    result: str
    """What a call gave."""
    result_order: str = "ns.calls | map(attribute='id') | unique(true) | list"
    """The ids of calls in whose order their results stand; results of other calls stand behind them, as they came."""
    tools_at: str = "last"
    """The turn of the user before which tools are declared: the "first" or the "last" one."""
    system: str = "[SYSTEM_PROMPT]{{- write(message.content) -}}[/SYSTEM_PROMPT]"
    """Words of the system where they come."""
    begin: str = ""
    """What stands inside a turn of the user before its words."""
    thoughts: str = ""
    """Earlier reasoning, of models that have tokens for it."""
    refusal: str = ""
    """What is raised, and when."""


_LISTED_CALLS = (
    '[TOOL_CALLS][{% for call in ns.calls %}{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}'
    '{% if call.id %}, "id": {{ call.id | tojson }}{% endif %}}{{ ", " if not loop.last }}{% endfor %}]'
)
_NAMED_CALLS = (
    "{% for call in ns.calls %}[TOOL_CALLS]{{ call.function.name }}ID[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}"
)
_V7 = _InstructForm(
    _LISTED_CALLS,
    "[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ words }}[/TOOL_RESULTS]",
    result_order="[]",
    refusal="{%- if ns.sounds and ns.system -%}"
    "{{- raise_exception('this model takes no words of the system beside sounds') -}}{%- endif -%}",
)
_FORMS: Mapping[str, _InstructForm] = {
    "v3": _InstructForm(
        _LISTED_CALLS,
        "[TOOL_RESULTS]{\"content\": {{ words if words[:1] in ('{', '[') else words | tojson }}, "
        '"call_id": {{ message.tool_call_id | tojson }}}[/TOOL_RESULTS]',
        result_order="[]",
        system="",
        begin="{{- ns.system ~ '\\n\\n' if ns.system and loop.index0 == ns.last -}}",
        refusal="{%- if ns.last < 0 -%}{{- raise_exception('the user must say something') -}}{%- endif -%}",
    ),
    "v7": _V7,
    "v11": _V7._replace(
        calls=_NAMED_CALLS.replace("ID", "{% if call.id %}[CALL_ID]{{ call.id }}{% endif %}"),
        result_order=_InstructForm._field_defaults["result_order"],
    ),
    "v13": _InstructForm(
        _NAMED_CALLS.replace("ID", ""),
        "[TOOL_RESULTS]{{ words }}[/TOOL_RESULTS]",
        tools_at="first",
        thoughts="{%- if message.reasoning_content -%}[THINK]{{- message.reasoning_content -}}[/THINK]{%- endif -%}",
    ),
}

_SOURCE = """\
{%- set ns = namespace(first=-1, last=-1, system='', sounds=false, text=false, calls=[], results=[]) -%}
{%- macro write(content) -%}
  {%- if content is string -%}
    {%- if content -%}{{- '\\n\\n' if ns.text -}}{{- content -}}{%- set ns.text = true -%}{%- endif -%}
  {%- else -%}
    {%- set parts = content -%}
    {%- set texts = parts[:-1] | selectattr('type', 'equalto', 'text') | list | length -%}
    {%- if texts and texts == parts | length - 1 and parts[-1].type == 'image' -%}
      {%- set parts = [parts[-1]] + parts[:-1] -%}
    {%- endif -%}
    {%- for part in parts -%}
      {%- if part.type == 'text' -%}
        {{- '\\n\\n' if ns.text -}}{{- part.text -}}{%- set ns.text = true -%}
      {%- else -%}
        {{- '[IMG]' if part.type == 'image' else '[BEGIN_AUDIO][AUDIO]' -}}{%- set ns.text = false -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro write_result(message) -%}
  {%- set ns.text = false -%}{%- set words = write(message.content) -%}$result
{%- endmacro -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if message.content is not string and message.content | selectattr('type', 'equalto', 'audio') | list -%}
      {%- set ns.sounds = true -%}
    {%- endif -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'user' -%}
      {%- set ns.last = loop.index0 -%}
      {%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}
    {%- endif -%}
  {%- elif message.role == 'system' -%}
    {%- set ns.text = ns.system != '' -%}{%- set ns.system = ns.system ~ write(message.content) -%}
  {%- elif message.role not in ('assistant', 'tool') -%}
    {{- raise_exception('a message must be of system, user, assistant or tool, not of ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
$refusal
{%- if tools and ns.first < 0 -%}{{- raise_exception('the user must say something beside tools') -}}{%- endif -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- set goes_on = not loop.last and messages[loop.index0 + 1].role == message.role -%}
  {%- set begins = loop.first or messages[loop.index0 - 1].role != message.role -%}
  {%- if begins or message.role == 'system' -%}{%- set ns.text = false -%}{%- endif -%}
  {%- if message.role == 'user' -%}
    {%- if begins -%}
      {%- if tools and loop.index0 == ns.$tools_at -%}
        [AVAILABLE_TOOLS]{{- tools | tojson -}}[/AVAILABLE_TOOLS]
      {%- endif -%}
      [INST]$begin
    {%- endif -%}
    {{- write(message.content) -}}
    {%- if not goes_on -%}[/INST]{%- endif -%}
  {%- elif message.role == 'system' -%}
    $system
  {%- elif message.role == 'assistant' -%}
    $thoughts
    {{- (write(message.content)).rstrip(' ') -}}
    {%- set ns.calls = message.tool_calls or [] -%}
    {%- if ns.calls -%}$calls{%- endif -%}
    {%- if not goes_on -%}{{- eos_token -}}{%- endif -%}
  {%- elif begins -%}
    {%- set ns.results = [] -%}
    {%- for later in messages[loop.index0:] -%}
      {%- if later.role != 'tool' -%}{%- break -%}{%- endif -%}
      {%- set ns.results = ns.results + [later] -%}
    {%- endfor -%}
    {%- set known = $result_order -%}
    {%- for id in known -%}
      {%- for result in ns.results if result.tool_call_id == id -%}{{- write_result(result) -}}{%- endfor -%}
    {%- endfor -%}
    {%- for result in ns.results if result.tool_call_id not in known -%}{{- write_result(result) -}}{%- endfor -%}
  {%- endif -%}
{%- endfor -%}
"""


def mistral_template(version: str, special_tokens: Collection[str]) -> str:
    """The template of a version, such as "v11"; empty for one whose form is not known."""
    form = _FORMS.get(version)
    if form is None:
        return ""
    if "[THINK]" not in special_tokens:
        form = form._replace(thoughts="")
    return Template(_SOURCE).substitute(form._asdict())

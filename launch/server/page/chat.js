// The chat box: a conversation held in this page, streamed from the server's own API.
// Everything shown is set as text, never as markup.

const talk = [];
let answering = null;

function bubble(kind) {
  $("hint")?.remove();
  const said = document.createElement("div");
  said.className = `said ${kind}`;
  $("log").append(said);
  return said;
}

// Fenced code becomes a block; all else is text as it is.
function fill(holder, text) {
  const parts = text.split("```");
  holder.replaceChildren(...parts.flatMap((part, at) => {
    if (at % 2 === 0) return part ? [document.createTextNode(part)] : [];
    const block = document.createElement("pre");
    block.textContent = part.replace(/^[\w+-]*\n/, "");
    return [block];
  }));
}

function bottom() {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  if (near) log.scrollTop = log.scrollHeight;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function answerTo(messages, signal) {
  const body = {
    model: modelName, messages, stream: true, stream_options: { include_usage: true },
    thinking: { type: $("think").checked ? "enabled" : "disabled" },
  };
  const answer = await ask("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
  });
  const said = bubble("assistant");
  const thought = document.createElement("details"), summary = document.createElement("summary");
  const inside = document.createElement("div"), text = document.createElement("div");
  const note = document.createElement("span");
  summary.textContent = "reasoning";
  thought.append(summary, inside);
  thought.hidden = true;
  note.className = "quiet";
  said.append(thought, text, note);
  let content = "", reasoning = "", finish = null;
  const began = performance.now();
  try {
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      content += choice?.delta?.content ?? "";
      reasoning += choice?.delta?.reasoning_content ?? "";
      finish = choice?.finish_reason ?? finish;
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        note.textContent = `${event.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`
          + (finish === "length" ? ", cut at the limit" : "");
      }
      thought.hidden = !reasoning;
      inside.textContent = reasoning;
      fill(text, content);
      bottom();
    }
  } finally {
    talk.push({ role: "assistant", content });
  }
}

$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (answering) { answering.abort(); return; }
  const text = $("say").value.trim();
  if (!text) return;
  $("say").value = "";
  bubble("user").textContent = text;
  talk.push({ role: "user", content: text });
  answering = new AbortController();
  $("send").textContent = "Stop";
  $("log").scrollTop = $("log").scrollHeight;
  try {
    await answerTo([...talk], answering.signal);
  } catch (error) {
    if (error.name !== "AbortError") bubble("error").textContent = error.message;
    if (talk[talk.length - 1].role === "user") talk.pop();
  }
  answering = null;
  $("send").textContent = "Send";
  bottom();
});

$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat").requestSubmit();
  }
});

$("clear").addEventListener("click", () => {
  answering?.abort();
  talk.length = 0;
  $("log").replaceChildren();
});

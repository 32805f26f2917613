// A setting in the fragment of an address: JSON, deflated, base64url. What comes back is checked by
// the library like any other request.

const MOST_BYTES = 8 * 2 ** 20;  // of the JSON: a fragment can be small and unpack to gigabytes

async function pipeThrough(bytes, transform, most = Infinity) {
  const reader = new Blob([bytes]).stream().pipeThrough(transform).getReader(), parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    size += value.length;
    if (size > most) {
      await reader.cancel();
      throw new Error("the link holds too much");
    }
    parts.push(value);
  }
}

export async function encode(state) {
  const packed = await pipeThrough(new TextEncoder().encode(JSON.stringify(state)), new CompressionStream("deflate-raw"));
  let text = "";
  for (let i = 0; i < packed.length; i += 4096) text += String.fromCharCode(...packed.subarray(i, i + 4096));
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Returns the state in a fragment, or null for an empty one. Raises an Error for a broken one. */
export async function decode(fragment) {
  if (!fragment) return null;
  if (!/^[\w-]+$/.test(fragment) || fragment.length > 4 * MOST_BYTES) throw new Error("the link is damaged");
  const text = atob(fragment.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const json = new TextDecoder("utf-8", { fatal: true }).decode(await pipeThrough(bytes, new DecompressionStream("deflate-raw"), MOST_BYTES));
  const state = JSON.parse(json);
  if (typeof state !== "object" || state === null || Array.isArray(state)) throw new Error("the link is damaged");
  return state;
}

export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Calls `work` again and again while the page is seen and `wanted()`, each time `pause()` seconds after it has ended.
 * Returns a function that calls it at once. `work` does not throw. */
export function poll(work, pause, wanted = () => true) {
  let timer;
  let running = false;
  let again = false;

  async function turn() {
    clearTimeout(timer);
    again = running;
    if (running) return;
    running = true;
    await work();
    running = false;
    if (again) turn();
    else if (!document.hidden && wanted()) timer = setTimeout(turn, 1000 * pause());
  }

  document.addEventListener("visibilitychange", () => (document.hidden || !wanted() ? clearTimeout(timer) : turn()));
  turn();
  return turn;
}

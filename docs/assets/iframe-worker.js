/* The search of the theme runs in a worker, and browsers start no workers for a page that was opened from a file. There,
   a hidden frame takes its place: it runs the same script, and passes the same messages on. */

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.inside = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = new URL(url, location);
          script.addEventListener("load", () => resolve(inside));
          script.addEventListener("error", () => reject(new Error(`cannot load ${script.src}`)));
          inside.document.body.append(script);
        });
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
